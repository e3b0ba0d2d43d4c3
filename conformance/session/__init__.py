"""One session of pytest with the suite: its options, verdicts, report and expected failures."""
