"""What the commands do, each with progress and a printable summary; the command line only parses and prints."""
