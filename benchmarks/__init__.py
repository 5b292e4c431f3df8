"""What dataload costs, beside what the same reads cost without it, in one run."""
