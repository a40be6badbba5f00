"""What people see of a job: live, as lines, as a summary, turn by turn."""
