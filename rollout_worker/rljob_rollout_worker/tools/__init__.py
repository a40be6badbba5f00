"""Built-in tools, one file each; entry point group `rljob.tools`."""
