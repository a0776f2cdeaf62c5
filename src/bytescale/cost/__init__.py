"""Layer 2: what things cost in time, memory and traffic. Counts, models, profiles. Free of torch."""
