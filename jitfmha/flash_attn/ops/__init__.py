"""Where flash-attn keeps its operators; of these there is the rotary embedding."""
