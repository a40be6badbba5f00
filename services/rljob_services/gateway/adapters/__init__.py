"""Wire protocols of chat clients, one file each."""
