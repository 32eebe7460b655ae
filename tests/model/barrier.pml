/*
 * How ranks change phase together: placement/group/protocol.py, as a model for spin.
 *
 * RANKS ranks make EPOCHS changes, one after the other. At most KILLS of them die, anywhere between two steps; a successor may come
 * in the place of each, the restarted process. With BOARD_LOSS the board may be lost at any moment, with LOSSES that many proposals
 * and votes never arrive. A deadline is a free choice: it may pass at any look, so what holds here holds for every timing. One
 * atomic step is one call of the board, or one thing that a rank does by itself. When nobody can go on, everybody has to be at the
 * end of its program: spin's own check for invalid end states is the property that nobody hangs.
 *
 * Left out, because a free choice covers it: the contents of messages (rank 0 finds two proposals or two votes different: it claims
 * ABORT, as it may at a deadline), duplicates (a put twice and a claim twice change nothing, within a step), a rank that is stopped
 * (nothing forces it to take a step), the death of a process with a message in flight (it is as if it had died a step later). A border that is refused before it begins is
 * a failure before the proposal. A rank that passes over an epoch takes the steps of one that obeys ABORT before it has moved.
 *
 * With SKIPS a job without faults in which so many borders are skipped: a rank makes PLACES attempts, all ranks wait for each other
 * between two of them, and a deadline passes only for a rank that is not coming. Then the last attempt succeeds.
 *
 * Properties: see `expect` below. Mutants, each of which must violate one: UNILATERAL, COUNTER, REUSE, EARLYFREE, FORGET, DESERT; with
 * SKIPS: BEHIND, TWICE.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef BOARD_LOSS
#define BOARD_LOSS 0
#endif

#ifdef SKIPS
#define PLACES 2
#define FAILS false /* nothing fails, and nobody is interrupted */
#define LATE(said) (ended[place] & ~said[e]) != 0
#else
#define FAILS true
#define LATE(said) true
#endif

#define NONE 0
#define COMMIT 1
#define ABORT 2
#define GO 1   /* basis: with a budget */
#define OVER 2 /* basis: without one, the epoch has been decided */

#define ALL ((1 << RANKS) - 1)
#define ME (1 << i)

/* --- the board: keys of each epoch; sets of ranks as bits */
byte proposal[EPOCHS];
byte vote[EPOCHS];
byte basis[EPOCHS];    /* write-once */
byte decision[EPOCHS]; /* write-once */
byte at;               /* the largest of `at/RANK` */
bool up = true;        /* the board answers */
byte losses;
#ifdef COUNTER
byte count[EPOCHS];
#endif

/* --- what is true of the ranks; no rank reads it */
byte alive = ALL;
byte kills;
byte source = ALL;         /* the copy to go back to exists */
byte prepared[EPOCHS];     /* has moved, and has not gone back */
byte obeyed[EPOCHS];       /* as what an epoch was obeyed first */
byte fenced_from = EPOCHS; /* from this epoch on, a member's place is held by a successor that has nothing */

/* The properties, by name: pan prints the one that fails. */
bool barrier = true;      /* who enters finds every living member prepared, or entered */
bool agreement = true;    /* no epoch is obeyed as COMMIT by one rank and as ABORT by another, those included who died later */
bool nothing_lost = true; /* who goes back, or is in doubt, has what to go back to */
bool fence = true;        /* no epoch is entered after a member's successor has joined */

#ifdef SKIPS
byte skips;
byte ended[PLACES];   /* who has made this attempt, or has skipped it */
byte missed[EPOCHS];  /* Decision.failures, where it is_late: for whom the others have waited in vain */
bool meet = true;     /* the last attempt of every rank succeeds: ranks that were apart have found each other */
#endif

inline expect(property, condition) { property = (condition); assert(property) }

/* What may happen instead of any step. */
#define DIES kills < KILLS -> goto dead
#define NO_ANSWER BOARD_LOSS || !up -> up = false; goto doubt

/* Board.put: may be lost without a word. */
inline put(set) {
    if
    :: set = set | ME
    :: losses < LOSSES -> losses++
    fi
}

/* Board.claim, for values that differ from NONE. */
inline write_once(register, value) { register = (register == NONE -> value : register) }

inline enter() {
    expect(barrier, ((prepared[e] | ~alive) & ALL) == ALL);
    expect(fence, e < fenced_from);
    expect(agreement, obeyed[e] != ABORT);
    obeyed[e] = COMMIT;
    source = source | ME
}

inline go_back() {
    expect(nothing_lost, (source & ME) != 0);
    expect(agreement, obeyed[e] != COMMIT);
    obeyed[e] = ABORT;
    prepared[e] = prepared[e] & ~ME
}

/* Group._forget_before, for one epoch: each rank its own keys, rank 0 those of all. */
inline forget(epoch) {
    proposal[epoch] = proposal[epoch] & ~ME;
    vote[epoch] = vote[epoch] & ~ME;
    basis[epoch] = (i == 0 -> NONE : basis[epoch]);
    decision[epoch] = (i == 0 -> NONE : decision[epoch])
}

proctype rank(byte i) {
    byte e;
    byte stands;
    bool interrupted;
#ifdef SKIPS
    byte place;
#endif

next:
#ifdef SKIPS
    atomic {
        if
        :: place == PLACES -> goto finish
        :: place == 0
        :: place > 0 && place < PLACES && ended[place - 1] == ALL
        fi;
        if
        :: place + 1 < PLACES && skips < SKIPS -> skips++; ended[place] = ended[place] | ME; place++; goto next
        :: true
        fi
    };
again:
#endif
    atomic {
        stands = NONE;
        interrupted = false;
        if
        :: e == EPOCHS -> goto finish
        :: else
        fi;
        /* Group.propose. Or the border is refused, or the user's code has raised since the last one: Together.failed */
        if
        :: DIES
        :: NO_ANSWER
        :: up -> put(proposal[e])
        :: up && FAILS -> goto failed
        fi
    };
    if
    :: i == 0 ->
        /* Group._compare_proposals, with _collect */
        atomic {
            if
            :: DIES
            :: NO_ANSWER
            :: up && proposal[e] == ALL -> write_once(basis[e], GO)
            :: up && proposal[e] != ALL && decision[e] != NONE
            :: up && LATE(proposal) -> goto ends /* the deadline, or different proposals */
            fi
        }
    :: i != 0
    fi;
    /* Group._basis */
    atomic {
        if
        :: DIES
        :: NO_ANSWER
        :: up && basis[e] == GO
        :: up && basis[e] == OVER -> goto ends
        :: up && basis[e] == NONE && LATE(proposal) -> goto ends /* the deadline */
        fi
    };
#ifndef FORGET
    if
    :: e > 0 ->
        atomic {
            if
            :: DIES
            :: NO_ANSWER
            :: up -> forget(e - 1)
            fi
        }
    :: e == 0
    fi;
#endif
    /* Reconciler.carry_out: the move */
    atomic {
        if
        :: DIES
        :: prepared[e] = prepared[e] | ME
#ifdef EARLYFREE
            ; source = source & ~ME
#endif
        :: FAILS -> goto failed
        fi
    };
    /* Group.agree: the vote */
    atomic {
        if
        :: DIES
        :: NO_ANSWER
#ifdef COUNTER
        :: up -> count[e] = count[e] + 1
        :: up -> count[e] = count[e] + 2 /* the answer was lost, and the client asked again */
#else
        :: up -> put(vote[e])
#endif
        fi
    };
    if
    :: i == 0 ->
        /* Group._count_votes, with _collect */
        atomic {
            if
            :: DIES
            :: NO_ANSWER
#ifdef COUNTER
            :: up && count[e] >= RANKS -> write_once(decision[e], COMMIT)
#else
            :: up && vote[e] == ALL -> write_once(decision[e], COMMIT)
#endif
            :: up && decision[e] != NONE
            :: up && FAILS -> goto ends /* the deadline, or different votes */
            fi
        }
    :: i != 0
    fi;
    /* Group._decision */
    atomic {
        if
        :: DIES
        :: NO_ANSWER
        :: up && decision[e] != NONE -> stands = decision[e]
#ifdef UNILATERAL
        :: up && decision[e] == NONE -> stands = ABORT
#else
        :: up && decision[e] == NONE && FAILS -> goto ends /* the deadline */
#endif
        :: FAILS -> goto failed /* an interrupt: Reconciler.carry_out goes back */
        fi
    };
    goto obey;

failed: /* Group.abort */
    atomic { interrupted = true; goto ends };

ends: /* Group._claim of ABORT, wherever it is called; then the basis, for who waits for that */
    atomic {
        if
        :: DIES
        :: NO_ANSWER
        :: up ->
#ifdef SKIPS
            missed[e] = (decision[e] == NONE -> ALL & ~proposal[e] : missed[e]);
#endif
            write_once(decision[e], ABORT); stands = decision[e]
        fi
    };
    if
    :: stands == ABORT ->
        atomic {
            if
            :: DIES
            :: NO_ANSWER
            :: up -> write_once(basis[e], OVER)
            fi
        }
    :: stands == COMMIT
    fi;

obey: /* Group._obey; or the loop of Group.abort */
    /* Group._enter_next_epoch: lost with the board, and nobody notices. Lost alone it would only cost time: a successor would end an
       epoch that is over, and the others would miss it at their next deadline. */
    atomic {
        if
        :: DIES
        :: up -> at = (at < e + 1 -> e + 1 : at)
        :: BOARD_LOSS || !up -> up = false
        fi
    };
    atomic {
        if
        :: DIES
#ifdef DESERT
        :: stands == ABORT || interrupted -> go_back(); interrupted = false
        :: stands == COMMIT && !interrupted -> enter()
#else
        :: stands == ABORT -> go_back(); interrupted = false
        :: stands == COMMIT -> enter()
#endif
        fi;
        e++;
#ifdef SKIPS
        if
#ifndef BEHIND
        :: stands == ABORT && (missed[e - 1] & ME) != 0 -> /* Group.propose, which passes over it */
#ifdef TWICE
            e++;
#endif
            goto again
#endif
        :: else
        fi;
        expect(meet, stands == COMMIT || place + 1 < PLACES);
        ended[place] = ended[place] | ME;
        place++;
#endif
        stands = NONE
    };
#ifdef FORGET
    atomic { if :: e > 1 -> forget(e - 2) :: else fi };
#endif
    if
    :: interrupted && e < EPOCHS -> goto ends /* interrupted after its vote: entered, and ends the next change */
    :: else -> goto next
    fi;

doubt: /* Group._reaching_the_board: CoordinatorLost */
    atomic { expect(nothing_lost, (source & ME) != 0); goto finish };

dead:
    atomic {
        kills++;
        alive = alive & ~ME;
        byte each;
        for (each : 0 .. EPOCHS - 1) { prepared[each] = prepared[each] & ~ME };
        each = 0;
        stands = NONE;
        interrupted = false;
        e = 0
    };
    /* Group._join of the restarted process, which finds its place taken. Or nobody restarts it, or it dies as well. */
    if
    :: up -> e = at
    :: goto finish
    fi;
#ifdef REUSE
    atomic { fenced_from = (e < fenced_from -> e : fenced_from); goto finish };
#endif
joins:
    atomic {
        if
        :: e == EPOCHS -> goto finish
        :: e < EPOCHS && (BOARD_LOSS || !up) -> up = false; goto finish
        :: e < EPOCHS && up
        fi;
        if
        :: decision[e] == NONE -> decision[e] = ABORT
        :: else -> e++; goto joins
        fi
    };
    atomic {
        if
        :: up -> write_once(basis[e], OVER)
        :: !up
        fi;
        fenced_from = (e < fenced_from -> e : fenced_from)
    };
finish:
    atomic { e = 0; stands = NONE; interrupted = false }
}

init {
    byte i;

    atomic {
        for (i : 0 .. RANKS - 1) { run rank(i) };
        i = 0
    }
}
