"""What `course` does about mutants."""
