"""The work of the commands, each with progress and a printable summary; the command line only parses and prints."""
