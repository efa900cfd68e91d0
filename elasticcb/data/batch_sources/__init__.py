"""The batch sources, one per file; `adapt` chooses one."""
