"""What `course` does about grading."""
