"""Which toggle makes an engine crash: culprits, belief, and the next trial. Pure: no I/O, no clock."""
