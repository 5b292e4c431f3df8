"""What a loader does, shown: timelines, live views, pictures."""
