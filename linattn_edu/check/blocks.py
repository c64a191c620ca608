"""Small functions that readers write on the way to an operator and that the package has inside a loop."""

import torch

from linattn_edu.algebra import solve_unit_lower


def merge(a, b):
    """Two blocks of keys as one: each is (m, z, o), its largest score, the sum of e^(s - m), and that of e^(s - m) v.

    m, z [..., 1], o [..., V]. Softmax attention over both blocks is o / z of the merged one; a block without keys is
    (-inf, 0, 0). Source: Milakov and Gimelshein 2018, section 3.1.
    """
    (m_a, z_a, o_a), (m_b, z_b, o_b) = a, b
    m = torch.maximum(m_a, m_b)
    w_a, w_b = (m_a - m).exp(), (m_b - m).exp()
    return m, w_a * z_a + w_b * z_b, w_a * o_a + w_b * o_b


def solve(A, X):
    """(I + A)^{-1} X for a strictly lower triangular A."""
    return solve_unit_lower(A, X)[0]
