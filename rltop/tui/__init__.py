"""The dashboard: one Textual app over a client's mirror of a run.

How it is put together: `picture` turns state keys into facts, a view of `widgets/` turns facts into rows (text and
style names), `widgets/pane.Pane` paints rows and repaints only lines that changed. Only `app`, `screens/` and `pane`
know Textual. Plain data are msgspec Structs: making a frozen dataclass costs a millisecond of start-up each, a Struct
nothing, and the first picture has to be there in 400 ms.
"""
