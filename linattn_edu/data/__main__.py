from linattn_edu.data import DIGITS, provenance

print(provenance(), DIGITS, sep="\n\n")
