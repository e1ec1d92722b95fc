"""Teachers: their architecture (TeacherSpec), their families and how they are loaded."""
