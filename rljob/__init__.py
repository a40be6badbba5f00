"""rljob: the contract that all rooms share, and the frame of the command line. It imports no room."""
