"""What `course` does about quizzes."""
