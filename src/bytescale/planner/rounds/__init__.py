"""The planner of rounds, for ranks that run in lockstep. ``planner`` says what it does, step by step."""
