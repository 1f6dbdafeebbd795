// The reductions, one function each. All are exact: no choice that is better than what is left is lost.
#pragma once

#include "working.hpp"

namespace fxpar::search {

// Strategies of neighbours that fit with none of this node's are impossible.
void support(Working& work, int node);

// A node with one strategy becomes costs of its neighbours.
void fix(Working& work, int node);

// A node whose strategy follows from a neighbour's becomes part of it (equality edges); so does a neighbour whose
// strategy follows from this node's. True if this node is gone.
bool tie(Working& work, int node);

// Whether a node has at most two neighbours and all that is left of it uses the same memory, so that its cost decides.
bool idle(const Working& work, int node);

// An idle node becomes a cost of its neighbours.
void eliminate(Working& work, int node);

// Strategies that cost and hold at least as much as another of their node, whatever the neighbours choose, are left
// out. True if there were any.
bool dominate(Working& work);

// Strategies, and pairs of neighbours', that hold more than there is room for when all others hold the least they can.
// True if there were any.
bool overfill(Working& work);

}  // namespace fxpar::search
