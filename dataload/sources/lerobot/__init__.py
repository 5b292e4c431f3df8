"""LeRobot data sets: a table of time steps, and the videos of cameras."""
