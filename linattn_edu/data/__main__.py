from . import provenance

print(provenance())
