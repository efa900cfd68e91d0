"""Messages and stubs generated from `proto/elasticcb.proto` when the package is built."""
