"""Where flash-attn keeps its operators; of these there are the rotary embedding and two norms."""
