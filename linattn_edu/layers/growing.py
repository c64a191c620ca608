"""A cache that grows by a row a token, without being copied for every token."""

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Room:
    """Memory with space behind its tokens: `buffer` [B, capacity, ...], of which `used` tokens are taken."""

    def __init__(self, buffer, used):
        self.buffer, self.used = buffer, used

    def fits(self, S, x):
        """Whether x [B, T, ...] can follow the first S tokens, and no other continuation of them is there."""
        free = self.used == S and S + x.shape[1] <= self.buffer.shape[1]
        return free and self.buffer.dtype == x.dtype and self.buffer.is_inference() == torch.is_inference_mode_enabled()


ROOMS = WeakTensorKeyDictionary()
"""The room in which a stored tensor lies, where it lies in one."""


def append(old, x):
    """old [B, S, ...] with x [B, T, ...] behind it; neither is changed.

    Where no gradient is asked for, the result may share its memory with `old`, an eighth of it spare: a token is copied
    a few times in the life of a cache, and not once for every later token.
    """
    S, T = old.shape[1], x.shape[1]
    if torch.is_grad_enabled() or S == 0 or T == 0:
        return torch.cat([old.to(x.dtype), x], 1)
    room = ROOMS.get(old)
    if room is None or not room.fits(S, x):
        room = Room(x.new_empty(x.shape[0], S + T + (S + T) // 8 + 64, *x.shape[2:]), S)
        room.buffer[:, :S] = old
    room.buffer[:, S : S + T] = x
    room.used = S + T
    result = room.buffer[:, : S + T]
    ROOMS[result] = room
    return result


def remember(stored, new):
    """The tensors `new` [B, T, ...] behind those of the tokens before."""
    return tuple(append(old, x) for old, x in zip(stored, new))
