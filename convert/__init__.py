"""What a teacher and a student are, and how weights pass from one to the other."""
