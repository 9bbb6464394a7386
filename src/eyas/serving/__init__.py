"""The serving room: takes a profile's target and head; gives vLLM's server with both, and a terminal that shows what it accepts."""
