from linattn_edu.data import provenance

print(provenance())
