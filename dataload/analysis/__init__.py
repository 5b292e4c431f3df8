"""Show what a loader does: timelines, live views, pictures."""
