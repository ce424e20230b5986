"""Linear algebra: functions of matrices, and products of vectors."""
