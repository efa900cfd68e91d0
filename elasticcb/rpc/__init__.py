"""Bytes between processes: servers, connections, frames; shared memory on one machine, streams to others."""
