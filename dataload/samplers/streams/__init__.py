"""Orders in which each row of a batch continues the same row of the previous batch."""
