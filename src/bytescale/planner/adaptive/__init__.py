"""Our planner. ``planner`` takes its steps one after another; every other module is a step or serves several."""
