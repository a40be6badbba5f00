"""The frame of the command line: parses before it imports; rooms add their commands by the entry-point group `rljob.commands`."""
