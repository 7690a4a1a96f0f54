"""What a GPU shows, in parts of minutes (`make gpu`)."""
