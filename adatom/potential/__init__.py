"""A worked example that ships: an interatomic potential on adatom.attention, its data, and its fit.

`adatom demo` fits it; examples/potential/ trains it in full, runs molecular dynamics and measures it.
"""
