"""One rank runs a step: the engine, its threads, random streams, the schedule, and the use of parameters."""
