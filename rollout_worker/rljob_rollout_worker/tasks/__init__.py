"""Built-in task families, one file each; entry point group `rljob.tasks`."""
