"""One token of a layer that chooses its keys: gathered, then attended to.

B rows, R rows of a joined weight, M channels of the heads together, D head width, I index heads,
G key/value heads, S slots of a cache, K chosen ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ltconvert.convert.decode_layers import LayerStep, Now, placed
from ltconvert.convert.mixers.dsa import SparseAttention
from ltconvert.convert.mixers.rope import apply_rope
from ltconvert.convert.students.static_layers import StaticIndexedKeys
from ltconvert.kernels.decode_attention import decode_attention
from ltconvert.kernels.index_topk import decode_topk


class SparseAttentionStep(LayerStep):
    """Attention over the keys that an indexer chooses among those of a slot."""

    def mix(self, y_BR: Tensor, cache_layer: StaticIndexedKeys, now: Now) -> Tensor:
        """See ``LayerStep``."""
        mixer: Any = self.layer.mixer
        qkv_BM, *index = y_BR.split([sum(self.sizes[:3]), *self.sizes[3:]], dim=-1)
        q_BHD = placed(qkv_BM, mixer, cache_layer, now, norms=True)
        used_B = now.used[cache_layer.slots]
        k_BGSD, v_BGSD = cache_layer.keys, cache_layer.values
        index_q_BID, index_k_BD = self._index(mixer, index[0], index[1], now)
        at_B1 = now.slots[cache_layer.slots].long()[:, None]
        keys_BSD = cache_layer.indexer_keys[:, 0]
        keys_BSD.scatter_(1, at_B1[..., None].expand(-1, 1, keys_BSD.shape[-1]), index_k_BD)
        count = min(mixer.top_k, mixer.window or mixer.top_k)
        if cache_layer.slots > count:
            chosen_BK = decode_topk(
                index_q_BID, keys_BSD, mixer.scaled(index[2]), mixer.top_k, used_B, mixer.window
            )
            k_BGSD, v_BGSD = (gathered(x, chosen_BK) for x in (k_BGSD, v_BGSD))
            used_B = used_B.clamp(max=count)
        o_BHD = decode_attention(
            q_BHD, k_BGSD, v_BGSD, used_B,
            scale=mixer.spec.attention_scale, soft_cap=mixer.spec.attention_softcap,
        )  # fmt: skip
        return o_BHD.flatten(1)

    @staticmethod
    def _index(
        mixer: SparseAttention, q_BM: Tensor, k_BD: Tensor, now: Now
    ) -> tuple[Tensor, Tensor]:
        """The indexer's queries [B, I, D], and its key as the cache takes it, [B, 1, D]."""
        q_BID = q_BM.unflatten(1, (mixer.index_heads, mixer.head_dim))
        k_B1D = mixer.index_k_norm(k_BD)[:, None]
        if mixer.rope_name is not None:
            tables = [table[:, None] for table in now.rope[mixer.rope_name]]  # a token a row
            q_BID, k_B1D = (apply_rope(x.unsqueeze(2), *tables).squeeze(2) for x in (q_BID, k_B1D))
        return q_BID, k_B1D


def gathered(x_BGSD: Tensor, chosen_BK: Tensor) -> Tensor:
    """Chosen slots of keys or values, [B, G, K, D]."""
    batch, groups, _, width = x_BGSD.shape
    return x_BGSD.gather(2, chosen_BK[:, None, :, None].expand(batch, groups, -1, width))
