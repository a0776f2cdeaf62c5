"""Layer 7: bytescale inside of other people's trainers. Each module needs the package that it is named after."""
