"""Programs of the project's own developers, which no wheel has: long profiles and the soak. Run in the clone."""
