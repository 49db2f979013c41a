"""A stand-in of the shape of slime: the names, arguments and order of calls that the hooks rely on."""
