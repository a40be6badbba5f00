"""The frame of the command line: parses before it imports; rooms add commands by entry points (`rljob.commands`)."""
