/*
 * The stages of one phase transition: placement/phases/moving/reconciler.py with Group.agree, as a model for spin.
 *
 * RANKS ranks make CHANGES phase transitions. In each, any rank may have engines that leave first, engines that are loaded last, both or
 * none. An epoch of the group is one step here: it ends with what the votes of all ranks add up to, or with ABORT. barrier.pml shows that
 * ranks can do that. With FAILS any rank may fail at any of its moves; without it nothing fails, and every phase transition succeeds.
 * When nobody can go on, everybody has to be at the end of its program: spin's own check for invalid end states shows that nobody hangs.
 *
 * Properties: see `expect` below. Mutants, each of which must violate one: NAMELESS, OWN, AT_ONCE.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef FAILS
#define FAILS 1
#endif

#define EPOCHS (3 * CHANGES)
#define NONE 0

/* stages, in their order */
#define LEFT 1
#define MOVED 2
#define LOADED 3

/* what a decision says, and what became of a phase transition */
#define COMMIT 1
#define ABORT 2

/* what a rank proposes: for each change one of three actions */
#define ENTER(change) (1 + 3 * (change))
#define GO_ON(change) (2 + 3 * (change))
#define LOAD(change) (3 + 3 * (change))

#define ALL ((1 << RANKS) - 1)
#define ME (1 << i)

/* --- the board, for each epoch */
byte action[EPOCHS];   /* what the first rank proposed */
byte proposal[EPOCHS]; /* sets of ranks as bits */
byte vote[EPOCHS];
byte stage[EPOCHS];    /* the least that any rank has voted for */
bool lacks[EPOCHS];    /* whether any rank has engines to load */
byte decision[EPOCHS];

/* --- what is true of the ranks; no rank reads it */
byte has_moved[CHANGES]; /* whose handles have moved */
byte outcome[CHANGES];   /* what the first rank to know it made of the phase transition */

bool together = true; /* a phase transition is made by all ranks, or by none */
bool room = true;     /* an engine is loaded only once every rank has given up the memory that it has to */
bool smooth = true;   /* where nothing fails, ranks with different engines do not fail either */

inline expect(property, condition) { property = (condition); assert(property) }

inline decide(epoch, value) { decision[epoch] = (decision[epoch] == NONE -> value : decision[epoch]) }

/* Group.propose, and the comparison of all proposals */
inline propose(what) {
    atomic {
        if
        :: action[e] == NONE -> action[e] = what
        :: action[e] == what
        :: else -> decide(e, ABORT)
        fi;
        proposal[e] = proposal[e] | ME
    };
    proposal[e] == ALL || decision[e] != NONE;
    if
    :: decision[e] == ABORT -> goto back
    :: else
    fi
}

/* Group.agree */
inline agree(how_far, has_more) {
    atomic {
        vote[e] = vote[e] | ME;
        stage[e] = (stage[e] == NONE || stage[e] > how_far -> how_far : stage[e]);
        lacks[e] = lacks[e] || has_more;
        if
        :: vote[e] == ALL -> decide(e, COMMIT)
        :: else
        fi
    };
    decision[e] != NONE;
    atomic {
        if
        :: decision[e] == ABORT -> goto back
        :: else
        fi;
#ifdef NAMELESS
        reached = how_far;
#else
        reached = stage[e];
#endif
#ifdef OWN
        more = has_more;
#else
        more = lacks[e];
#endif
        e++
    }
}

/* A move. One that fails ends the epoch for all ranks. */
inline moves() {
    if
    :: true
    :: FAILS -> decide(e, ABORT); goto back
    fi
}

inline ends_with(what) {
    expect(together, outcome[change] == NONE || outcome[change] == what);
    outcome[change] = what
}

proctype rank(byte i) {
    byte e;
    byte change;
    byte reached;
    bool more;
    bool leaves;
    bool loads;

next:
    atomic {
        if
        :: change == CHANGES -> goto finish
        :: else
        fi;
        if
        :: leaves = true
        :: leaves = false
        fi;
        if
        :: loads = true
        :: loads = false
        fi
    };
    propose(ENTER(change));
    /* Reconciler._move_together: the engines leave */
    if
    :: leaves ->
        atomic { moves() };
        agree(LEFT, false);
        propose(GO_ON(change))
    :: else
    fi;
    /* the other handles move */
    atomic { moves(); has_moved[change] = has_moved[change] | ME };
#ifdef AT_ONCE
    atomic { if :: loads -> expect(room, has_moved[change] == ALL) :: else fi };
#endif
    agree(MOVED, loads);
    do
    :: reached == MOVED -> break
    :: else ->
        propose(GO_ON(change));
        agree(MOVED, loads)
    od;
    /* Reconciler.carry_out: the engines are loaded */
    if
    :: more ->
        propose(LOAD(change));
        atomic { if :: loads -> expect(room, has_moved[change] == ALL) :: else fi; moves() };
        agree(LOADED, false)
    :: else
    fi;
    atomic { ends_with(COMMIT); change++; goto next };

back:
    atomic {
        expect(smooth, FAILS);
        ends_with(ABORT);
        e++;
        change++;
        goto next
    };

finish:
    atomic { e = 0; change = 0; reached = 0; more = false; leaves = false; loads = false }
}

init {
    byte i;

    atomic {
        for (i : 0 .. RANKS - 1) { run rank(i) };
        i = 0
    }
}
