"""The batch sources, by kind of data; `adapt` chooses one."""
