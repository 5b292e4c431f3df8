"""Files in object stores and on web servers, read through obstore, which is imported on first use."""
