"""What `course` does to show that the outputs in the texts are what their commands print."""
