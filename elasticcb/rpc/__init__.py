"""Communication between processes: servers, connections, frames; shared memory on one machine, streams between
machines."""
