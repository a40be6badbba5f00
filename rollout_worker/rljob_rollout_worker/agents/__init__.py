"""Built-in agents, one file each; entry point group `rljob.agents`."""
