"""Layer 9: the command ``bytescale``. One module a command; heavy imports happen inside the command that needs them."""
