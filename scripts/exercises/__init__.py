"""What `course` does about exercises."""
