"""Rank processes: how they are started, watched, replaced, and given their tasks."""
