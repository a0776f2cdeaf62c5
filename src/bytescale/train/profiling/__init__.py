"""Measuring the machine: times of layers, links and offloading, for the cost model."""
