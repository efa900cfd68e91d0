"""Bytes between processes: servers, connections, frames, and what processes of one machine share."""
